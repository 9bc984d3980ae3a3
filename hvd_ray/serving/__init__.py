"""Serving: an OpenAI front over replicas of the decoder, on Ray Serve.

`front` speaks HTTP and knows no model; `replica` owns one and its decoding thread; `calls` is what
passes between them. `app` puts both on Ray Serve.
"""
