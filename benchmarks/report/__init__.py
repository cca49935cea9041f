"""Shows results: tables in the terminal, one JSON line, and one self-contained HTML page with plots."""
