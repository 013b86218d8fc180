"""What `composer-prime ablate` runs: the arms of a recipe over several seeds, judged on held-out tasks, in one report."""
