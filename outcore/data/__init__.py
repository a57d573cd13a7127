"""Training data: from files of rows to batches of tokens, each step a value handed to the next.

sources → rows → examples → documents of tokens → a cache on disk → packed sequences → batches.
"""
