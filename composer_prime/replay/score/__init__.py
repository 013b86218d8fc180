"""What teachers say to a token: the likeliest next tokens with their log-probabilities, and what the rest holds."""
