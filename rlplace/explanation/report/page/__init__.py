"""Template, style and scripts of the page; `rlplace.explanation.report.report` fills them."""
