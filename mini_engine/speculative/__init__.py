"""Speculative decoding: drafters guess the next tokens of a request, and one step checks all guesses."""
