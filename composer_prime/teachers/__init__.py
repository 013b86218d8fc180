"""Teachers: served models that say what they would at each token; their mixture, and whether they are better."""
