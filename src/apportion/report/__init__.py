"""One self-contained HTML page for a run or a study, opened from disk with no network.

`page` is the paper, `learning` and `outcomes` are the pictures on it, `folders` reads what a run or a
study left.
"""

from apportion.report.folders import write_report as write_report
from apportion.report.page import Facts as Facts
from apportion.report.page import Glossary as Glossary
from apportion.report.page import Headline as Headline
from apportion.report.page import Headlines as Headlines
from apportion.report.page import Picture as Picture
from apportion.report.page import Plot as Plot
from apportion.report.page import Section as Section
from apportion.report.page import Table as Table
from apportion.report.page import Words as Words
from apportion.report.page import page as page
