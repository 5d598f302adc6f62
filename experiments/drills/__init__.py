"""Faults injected into lab jobs, several times each: does the job survive, and does its report name the fault?"""
