"""The paper's evaluation, planned anew: a module per table or figure, each a `section()` in Markdown."""
