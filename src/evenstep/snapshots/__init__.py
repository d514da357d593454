"""What a training needs to go on from where it was: taken, checked, kept, found again."""
