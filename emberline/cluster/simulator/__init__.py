"""A fleet in virtual time: the balancer's own code, or that of others, over modelled workers and recorded traffic."""
