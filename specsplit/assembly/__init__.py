"""Settings to objects: engines over models loaded here or clients of workers elsewhere, and orchestrators over either.

Imports stay cheap: torch comes with the models, grpc with the links.
"""
