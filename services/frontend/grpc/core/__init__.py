"""Call handling on grpc's core, beneath grpc's public server interface."""
