//! Repairs links, addresses and routes of pods that were removed by another program, and moves pods off
//! the bridge that an earlier version attached to it.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd as _;

use sys::netlink::{Link, Netlink};

use crate::{
    Attachment, Error, POD_INTERFACE, ROUTE_PROTOCOL, attach_in, configure, kernel_error, node_mac, route,
};

/// The attachments that are incomplete on the node's side.
pub fn incomplete(attachments: Vec<Attachment>) -> Result<Vec<Attachment>, Error> {
    if attachments.is_empty() {
        return Ok(attachments);
    }
    let mut host = Netlink::open().map_err(kernel_error("open a netlink socket"))?;
    let links = host.links().map_err(kernel_error("list links"))?;
    let addresses = host.all_addresses().map_err(kernel_error("list addresses"))?;
    let routes = host.link_routes(ROUTE_PROTOCOL).map_err(kernel_error("list routes"))?;
    let on_link = |(link, address, _): (u32, IpAddr, u8)| (link, address);
    let addresses: BTreeSet<(u32, IpAddr)> = addresses.into_iter().map(on_link).collect();
    let routes: BTreeSet<(u32, IpAddr)> = routes.into_iter().map(on_link).collect();
    let is_complete = |attachment: &Attachment| {
        let link = links.iter().find(|link| link.name == attachment.link);
        link.is_some_and(|link| {
            link.is_up
                && link.master == 0
                && attachment.addresses.iter().all(|address| {
                    addresses.contains(&(link.index, address.gateway))
                        && routes.contains(&(link.index, address.ip))
                })
        })
    };
    Ok(attachments.into_iter().filter(|attachment| !is_complete(attachment)).collect())
}

/// Restores the attachment of the pod with this network namespace. What exists is kept, so that
/// connections survive.
pub fn restore(attachment: &Attachment, namespace: File) -> Result<(), Error> {
    let mut host = Netlink::open().map_err(kernel_error("open a netlink socket"))?;
    let link =
        host.link(&attachment.link).map_err(kernel_error("look up the node's end of the pod's link"))?;
    let Some(link) = link else {
        return run_in_namespace(namespace, |own| attach_in(&mut host, attachment, own));
    };
    let was_port = link.master != 0;
    if was_port {
        detach_from_bridge(&mut host, &link, attachment)?;
    }
    configure(&attachment.link, &attachment.bridge)?;
    route(&mut host, link.index, attachment)?;
    if was_port {
        run_in_namespace(namespace, |_| remove_subnet_routes(attachment))?;
    }
    Ok(())
}

/// Detaches a link that an earlier version attached to the bridge.
fn detach_from_bridge(host: &mut Netlink, link: &Link, attachment: &Attachment) -> Result<(), Error> {
    host.set_master(link.index, 0)
        .map_err(kernel_error(format!("detach {} from its bridge", attachment.link)))?;
    let named = kernel_error(format!("set the MAC address of {}", attachment.link));
    host.set_mac(link.index, node_mac(attachment)).map_err(named)
}

/// Removes the pod's routes to its subnet: other pods are no longer on its link and are reached through
/// the gateway.
fn remove_subnet_routes(attachment: &Attachment) -> Result<(), Error> {
    let mut inside =
        Netlink::open().map_err(kernel_error("open a netlink socket in the pod's network namespace"))?;
    let Some(link) = inside.link(POD_INTERFACE).map_err(kernel_error("look up the pod's link"))? else {
        return Ok(());
    };
    for address in &attachment.addresses {
        let named = kernel_error(format!("remove the pod's route to {}/{}", address.ip, address.prefix));
        let network = crate::Cidr::around(address.ip, address.prefix).base();
        inside.delete_link_route(link.index, network, address.prefix).map_err(named)?;
    }
    Ok(())
}

/// Runs `work` in a network namespace, on a separate thread that ends afterwards, so that no other code
/// runs there.
fn run_in_namespace(
    namespace: File,
    work: impl FnOnce(File) -> Result<(), Error> + Send,
) -> Result<(), Error> {
    let enter = || {
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).map_err(std::io::Error::from)
    };
    std::thread::scope(|scope| {
        let task = scope.spawn(|| {
            enter().map_err(kernel_error("enter the pod's network namespace"))?;
            let own = namespace
                .try_clone()
                .map_err(kernel_error("duplicate the handle of the pod's network namespace"))?;
            work(own)
        });
        task.join().unwrap_or_else(|_| {
            Err(kernel_error("enter the pod's network namespace")(std::io::ErrorKind::Other.into()))
        })
    })
}
