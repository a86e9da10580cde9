"""Call handling on grpc's core, below grpc's public server interface."""
