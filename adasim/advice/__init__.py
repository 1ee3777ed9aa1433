"""From data and traffic to advice: does speculation pay, with which policy, and how sure is that?"""
