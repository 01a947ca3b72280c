//! The engine for several servers: etcd v3.
