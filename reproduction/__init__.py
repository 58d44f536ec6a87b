"""The paper's figures: from the model of time and energy alone, or from trainings as well."""
