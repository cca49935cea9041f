import os

# transformers reads this when it is imported, by whichever file of these comes first; where there is no torch it would
# complain on stderr, though a tokenizer needs none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
