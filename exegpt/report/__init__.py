"""What a job leaves behind: result files, tables, timelines, plots and the report page."""
