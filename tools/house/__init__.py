"""`make house`: the measurable rules of the code, each with its bar, in one table."""
