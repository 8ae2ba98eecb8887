"""Template, style and scripts of the page; `rlplace.reporting.render` fills them."""
