"""How `--help` travels from the parser, which knows the text, to the one place that prints."""


class HelpAsked(Exception):
    """`--help` was among the arguments; the exception's text is what to show."""
