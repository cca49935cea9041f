"""The ports over gRPC."""
