"""Text teachers: what each would have done at a decision point, what it cost, and what they agree on."""
