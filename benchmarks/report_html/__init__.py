"""One self-contained page of results files: plots, tables, where each number comes from. Measures nothing."""
