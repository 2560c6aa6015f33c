"""Formulas as MathML, written when the pages are built: no script and no network to read them."""

import re
from html import unescape

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(html, **_):
    html = _INLINE.sub(lambda found: convert(unescape(found[1]).strip()), html)
    return _DISPLAY.sub(lambda found: convert(unescape(found[1]).strip(), display="block"), html)
