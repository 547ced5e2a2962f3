"""Measures a real model: many clients against one at a time, a prefix that is shared, tiers that are fair.

Drives an engine by hand, so that arrival times are its own, and reads what it reports off the plans, the blocks and the
events of the scheduler that serves. Times are measured; sharing, copies and order are checked.
"""
