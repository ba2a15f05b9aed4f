"""Figures: targets, loss, schedules, fine-tuning."""
