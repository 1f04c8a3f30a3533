"""Programs that use Tinsmith the way its users do: through the unmodified `tinker` SDK."""
