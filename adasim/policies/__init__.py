"""Rules that decide how many tokens to draft and verify, and who is admitted."""
