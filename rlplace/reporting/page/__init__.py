"""Template, style and scripts of the page; `rlplace.reporting.report` fills them."""
