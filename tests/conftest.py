"""What every test shares."""

from hypothesis import settings

# A slow machine must not fail a property test; the pytest timeout bounds it instead.
settings.register_profile("penstock", deadline=None, print_blob=True)
settings.load_profile("penstock")
