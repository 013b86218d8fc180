"""A run for volunteers whose bucket's keys stay with its owner: signed requests in, presigned URLs and records out.

Holds no state that another gateway of the same run would miss, so several may run.
"""
