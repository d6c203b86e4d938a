"""Puts this directory on the import path, so that every room finds `synthetic`."""
