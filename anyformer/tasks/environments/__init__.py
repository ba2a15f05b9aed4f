"""Environments: recording of demonstrations, and evaluation of runs by rollouts. Gymnasium needs the extra `env`.

environment  one interface to Gymnasium, BabyAI and key-to-door, with their experts
record       demonstrations of an expert or of random actions, by several processes
rollout      episodes that a run plays, many at once with one call of the model per step, and the film of one
"""
