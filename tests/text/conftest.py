from hypothesis import settings

# The same examples every time, and no clock: machines that run tests are busy.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("steady")
