"""What requests cost the services, and each other."""
