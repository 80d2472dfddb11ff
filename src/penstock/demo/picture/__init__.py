"""What was recorded while the pipeline ran, and the page that shows it."""
