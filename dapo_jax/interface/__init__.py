"""What `import dapo_jax` offers: docs/api.md."""
