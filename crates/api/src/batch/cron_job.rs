//! CronJob: what is special about it.

use crate::kind::Kind;

pub struct CronJob;

impl Kind for CronJob {}
