from hypothesis import HealthCheck, settings

settings.register_profile("thorough", max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
