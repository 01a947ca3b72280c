//! Rate limits of links.

use std::io;

use super::message::{Message, c_string};
use super::{ACK, CREATE, Netlink, REPLACE};

/// `TC_H_ROOT`: everything that a link sends.
const TC_ROOT: u32 = 0xffff_ffff;
/// `TCA_TBF_*`
const TBF_PARAMETERS: u16 = 1;
const TBF_RATE64: u16 = 4;
const TBF_BURST: u16 = 6;
/// `TC_LINKLAYER_ETHERNET`
const LINK_LAYER_ETHERNET: u8 = 1;

/// A rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Bytes per second.
    pub bytes: u64,
    /// Bytes that may be sent in a burst.
    pub burst: u32,
    /// Bytes that may be queued. Packets beyond that are dropped.
    pub queue: u32,
}

impl Netlink {
    /// Limits what a link sends, with a token bucket filter.
    pub fn set_rate_limit(&mut self, index: u32, rate: Rate) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWQDISC, CREATE | REPLACE | ACK);
        // tcmsg: family and padding, interface index, handle, parent, info.
        message.raw(&[0; 4]);
        message.raw(&index.to_ne_bytes());
        message.raw(&0x0001_0000u32.to_ne_bytes());
        message.raw(&TC_ROOT.to_ne_bytes());
        message.raw(&0u32.to_ne_bytes());
        message.attribute(libc::TCA_KIND, &c_string("tbf"));
        message.nested(libc::TCA_OPTIONS, |options| {
            let slow = u32::try_from(rate.bytes).unwrap_or(u32::MAX);
            options.nested(TBF_PARAMETERS, |parameters| {
                // tc_ratespec: cell_log, linklayer, overhead, cell_align, mpu, rate.
                parameters.raw(&[0, LINK_LAYER_ETHERNET, 0, 0, 0, 0, 0, 0]);
                parameters.raw(&slow.to_ne_bytes());
                // No peak rate.
                parameters.raw(&[0; 12]);
                parameters.raw(&rate.queue.to_ne_bytes());
                // The burst in ticks, which is given in bytes below, and the mtu of the peak rate.
                parameters.raw(&[0; 8]);
            });
            if u64::from(slow) < rate.bytes {
                options.attribute(TBF_RATE64, &rate.bytes.to_ne_bytes());
            }
            options.attribute(TBF_BURST, &rate.burst.to_ne_bytes());
        });
        self.request(message).map(drop)
    }
}
