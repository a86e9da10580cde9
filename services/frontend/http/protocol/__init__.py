"""HTTP/1.1 connections built on uvicorn's private httptools protocol; see README.md."""
