"""Drawn scenes with exact answers, the media files made of them, and small trained models that answer.

Together they make the first command real: no download, no account, and a truth to compare every answer with.
"""
