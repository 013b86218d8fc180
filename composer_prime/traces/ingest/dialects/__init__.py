"""How APIs speak of calls: requests, responses, streams and the parts of messages, which several formats hold."""
