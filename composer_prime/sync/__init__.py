"""The outer loop between sites: pure decisions, the records in the bucket, and the driver that a trainer calls.

The only room that knows both the outer math and the store. This package itself imports no torch.
"""
