"""Does 1-bit LAMB train as well as LAMB? Real trainings of small models, n ranks simulated in one process."""
