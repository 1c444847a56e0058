"""What a page of the report is made of: sections, tables, figures, and their HTML and Markdown."""
