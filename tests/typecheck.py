"""Every annotation of the package is checked at run time while it is tested; an int is a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
