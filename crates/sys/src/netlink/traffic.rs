//! How fast a link may send.

use std::io;

use super::message::{Message, c_string};
use super::{ACK, CREATE, Netlink, REPLACE};

/// `TC_H_ROOT`: all a link sends.
const TC_ROOT: u32 = 0xffff_ffff;
/// `TCA_TBF_*`
const TBF_PARAMETERS: u16 = 1;
const TBF_RATE64: u16 = 4;
const TBF_BURST: u16 = 6;
/// `TC_LINKLAYER_ETHERNET`
const LINK_LAYER_ETHERNET: u8 = 1;

/// What a link may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Bytes a second.
    pub bytes: u64,
    /// Bytes that may go at once.
    pub burst: u32,
    /// Bytes that may wait for their turn; what comes on top is lost.
    pub queue: u32,
}

impl Netlink {
    /// Lets a link send no more than this, by a token bucket.
    pub fn set_rate_limit(&mut self, index: u32, rate: Rate) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWQDISC, CREATE | REPLACE | ACK);
        // Family and padding, link, handle, parent, info.
        message.raw(&[0; 4]);
        message.raw(&index.to_ne_bytes());
        message.raw(&0x0001_0000u32.to_ne_bytes());
        message.raw(&TC_ROOT.to_ne_bytes());
        message.raw(&0u32.to_ne_bytes());
        message.attribute(libc::TCA_KIND, &c_string("tbf"));
        message.nested(libc::TCA_OPTIONS, |options| {
            let slow = u32::try_from(rate.bytes).unwrap_or(u32::MAX);
            options.nested(TBF_PARAMETERS, |parameters| {
                // The rate: cell, link layer, overhead, alignment, smallest packet, bytes a second.
                parameters.raw(&[0, LINK_LAYER_ETHERNET, 0, 0, 0, 0, 0, 0]);
                parameters.raw(&slow.to_ne_bytes());
                // No peak rate.
                parameters.raw(&[0; 12]);
                parameters.raw(&rate.queue.to_ne_bytes());
                // The burst in ticks, which is given in bytes below, and the peak's largest packet.
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
