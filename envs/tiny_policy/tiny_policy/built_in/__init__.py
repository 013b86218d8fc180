"""The models that composer-prime knows by name, such as `model.name = "tiny-tools"`, for the tasks in this clone.

models (what each is), warm_ups (its training, in numbers), letters (that of those that answer with letters), tools
(that of those that call tools), with conversations (what they are shown) and phrases (what they have tokens for).
"""
