"""Weights: fetched or adopted, verified, and placed where they are served from."""
