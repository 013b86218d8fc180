"""What `composer-prime ablate` runs: a recipe's arms over several seeds, judged on held-out tasks, in a report."""
