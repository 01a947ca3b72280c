//! Rewrites links in proxied responses: links to the proxied server lead through the proxy.
//! Upstream: `proxyutil.Transport`.

/// The attributes of elements that contain links, as upstream's `atomsToAttrs`.
const LINK_ATTRIBUTES: &[(&[&str], &[&str])] = &[
    (&["a", "area", "base", "link"], &["href"]),
    (&["audio", "embed", "script", "source"], &["src"]),
    (&["blockquote", "del", "ins", "q"], &["cite"]),
    (&["frame", "iframe"], &["longdesc", "src"]),
    (&["applet"], &["codebase"]),
    (&["body"], &["background"]),
    (&["button"], &["formaction"]),
    (&["command"], &["icon"]),
    (&["form"], &["action"]),
    (&["head"], &["profile"]),
    (&["html"], &["manifest"]),
    (&["img"], &["longdesc", "src", "usemap"]),
    (&["input"], &["src", "usemap", "formaction"]),
    (&["object"], &["classid", "codebase", "data", "usemap"]),
    (&["video"], &["poster", "src"]),
];

/// The proxy path, and the hosts whose links are rewritten.
pub struct LinkUpdater<'a> {
    /// The path of the proxy, up to `/proxy`.
    pub prefix: &'a str,
    /// The address of the proxied server.
    pub upstream_addr: &'a str,
    /// The host that the client used for this server.
    pub host: &'a str,
}

impl LinkUpdater<'_> {
    /// The link through the proxy; `None` if it must not be changed.
    pub fn proxied_link(&self, link: &str) -> Option<String> {
        let (before, path) = match link.find("//") {
            Some(0) => self.split_own_host(link, 2)?,
            Some(at) if matches!(&link[..at], "http:" | "https:") => self.split_own_host(link, at + 2)?,
            _ => ("", link),
        };
        if !path.starts_with('/') {
            return None;
        }
        if path.starts_with(self.prefix) {
            return Some(format!("{before}{path}"));
        }
        Some(format!("{before}{}{path}", self.prefix))
    }

    /// Splits a link whose host starts at `at` and is one of the rewritten hosts: the part before
    /// the path, and the path.
    fn split_own_host<'l>(&self, link: &'l str, at: usize) -> Option<(&'l str, &'l str)> {
        let end = link[at..].find(['/', '?', '#']).map_or(link.len(), |end| at + end);
        match &link[at..end] {
            host if host == self.host => Some((&link[..end], &link[end..])),
            host if host == self.upstream_addr => Some(("", &link[end..])),
            _ => None,
        }
    }

    /// Rewrites the links of a page. All other bytes stay unchanged.
    pub fn update_page(&self, page: &[u8]) -> Vec<u8> {
        let Ok(text) = std::str::from_utf8(page) else { return page.to_vec() };
        let mut out = String::with_capacity(page.len() + 256);
        let mut rest = text;
        while let Some(at) = rest.find('<') {
            out.push_str(&rest[..at]);
            rest = &rest[at..];
            if let Some(end) = rest.strip_prefix("<!--").and_then(|inner| inner.find("-->")) {
                let (comment, after) = rest.split_at(end + 7);
                out.push_str(comment);
                rest = after;
                continue;
            }
            let length = self.update_element(rest, &mut out);
            let name = name_of(&rest[1..]).to_ascii_lowercase();
            rest = &rest[length..];
            // The content of these elements is not markup.
            if matches!(name.as_str(), "script" | "style" | "textarea" | "title") {
                let end = find_close(rest, &name);
                out.push_str(&rest[..end]);
                rest = &rest[end..];
            }
        }
        out.push_str(rest);
        out.into_bytes()
    }

    /// Writes one start tag and returns its length in the input.
    fn update_element(&self, text: &str, out: &mut String) -> usize {
        let name = name_of(&text[1..]);
        let lower = name.to_ascii_lowercase();
        let link_attributes = LINK_ATTRIBUTES.iter().find(|(names, _)| names.contains(&lower.as_str()));
        let mut at = 1 + name.len();
        out.push_str(&text[..at]);
        if name.is_empty() {
            return at;
        }
        loop {
            let rest = &text[at..];
            let whitespace =
                rest.len() - rest.trim_start_matches(|c: char| c.is_whitespace() || c == '/').len();
            out.push_str(&rest[..whitespace]);
            at += whitespace;
            let rest = &text[at..];
            match rest.chars().next() {
                None => return at,
                Some('>') => {
                    out.push('>');
                    return at + 1;
                }
                _ => {}
            }
            let end =
                rest.find(|c: char| c.is_whitespace() || matches!(c, '=' | '>' | '/')).unwrap_or(rest.len());
            // A stray character is copied as it is.
            let end = end.max(rest.chars().next().map_or(1, char::len_utf8));
            let attribute = rest[..end].to_ascii_lowercase();
            out.push_str(&rest[..end]);
            at += end;
            let rest = &text[at..];
            let trimmed = rest.trim_start();
            let Some(after) = trimmed.strip_prefix('=') else { continue };
            let after = after.trim_start();
            out.push_str(&rest[..rest.len() - after.len()]);
            at += rest.len() - after.len();
            let (value, whole) = value_of(after);
            let link =
                link_attributes.is_some_and(|(_, attributes)| attributes.contains(&attribute.as_str()));
            match link.then(|| self.proxied_link(value)).flatten() {
                Some(updated) => out.push_str(&after[..whole].replacen(value, &updated, 1)),
                None => out.push_str(&after[..whole]),
            }
            at += whole;
        }
    }
}

fn name_of(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(text.len());
    if text.starts_with(|c: char| c.is_ascii_alphabetic()) { &text[..end] } else { "" }
}

/// An attribute's value, and its length in the input including quotes.
fn value_of(text: &str) -> (&str, usize) {
    for quote in ['"', '\''] {
        if let Some(inner) = text.strip_prefix(quote) {
            return match inner.find(quote) {
                Some(end) => (&inner[..end], end + 2),
                None => (inner, text.len()),
            };
        }
    }
    let end = text.find(|c: char| c.is_whitespace() || c == '>').unwrap_or(text.len());
    (&text[..end], end)
}

fn find_close(text: &str, name: &str) -> usize {
    let lower = text.to_ascii_lowercase();
    lower.find(&format!("</{name}")).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEST_LINKS: LinkUpdater<'static> =
        LinkUpdater { prefix: "/p/proxy", upstream_addr: "10.0.0.1:80", host: "api:6443" };

    #[track_caller]
    fn check(link: &str, expected: Option<&str>) {
        assert_eq!(TEST_LINKS.proxied_link(link).as_deref(), expected, "{link}");
    }

    #[test]
    fn updates_links() {
        check("/a/b?c=d#e", Some("/p/proxy/a/b?c=d#e"));
        check("/", Some("/p/proxy/"));
        check("relative", None);
        check("#top", None);
        check("mailto:a@b", None);
        check("http://10.0.0.1:80/x", Some("/p/proxy/x"));
        check("https://api:6443/x", Some("https://api:6443/p/proxy/x"));
        check("//elsewhere/x", None);
        check("http://elsewhere/x", None);
        check("/p/proxy/x", Some("/p/proxy/x"));
        check("x//y", None);
    }

    #[track_caller]
    fn check_page(html: &str, expected: &str) {
        assert_eq!(String::from_utf8_lossy(&TEST_LINKS.update_page(html.as_bytes())), expected);
    }

    #[test]
    fn updates_pages() {
        check_page(r#"<a href="/rewriteme">test</a>"#, r#"<a href="/p/proxy/rewriteme">test</a>"#);
        check_page("<IMG SRC = '/x' alt=\"a > b\"/>", "<IMG SRC = '/p/proxy/x' alt=\"a > b\"/>");
        check_page("<a title=/x href=/y>/z</a>", "<a title=/x href=/p/proxy/y>/z</a>");
        check_page("<!-- <a href='/x'> --><p>1 < 2", "<!-- <a href='/x'> --><p>1 < 2");
        check_page(
            "<script src='/s'>a='<a href=\"/x\">'</script><a href='/y'>",
            "<script src='/p/proxy/s'>a='<a href=\"/x\">'</script><a href='/p/proxy/y'>",
        );
        check_page("<a href", "<a href");
        check_page("<a href=\"/x", "<a href=\"/p/proxy/x");
    }

    proptest! {
        #[test]
        fn page_without_links_is_unchanged(html in "[<>a-z=\"'/ !-]{0,60}") {
            let nothing = LinkUpdater { prefix: "", upstream_addr: "", host: "" };
            prop_assert_eq!(nothing.update_page(html.as_bytes()), html.as_bytes());
        }
    }
}
